"""SDAE in float64, token by token, straight from the formulas of METHOD section 2."""

import math

import numpy as np

EPS = 1e-6


def shares(grades, exists):
    """p_k of one row, and whether it counts as graded."""
    names = [k for k in range(len(grades)) if exists[k]]
    parsed = [k for k in names if 1 <= grades[k] <= 5]
    share = np.zeros(len(grades))
    if not parsed or 2 * len(parsed) < len(names):
        share[names] = 1 / len(names)
        return share, False
    mean = np.mean([grades[k] for k in parsed])
    filled = {k: grades[k] if k in parsed else mean for k in names}
    total = sum(g - 1 for g in filled.values())
    for k in names:
        share[k] = (filled[k] - 1) / total if total > 0 else 1 / len(names)
    return share, True


def kernel(turns, pivot, sigma, over):
    """m over the tokens of a row, of mean one over the tokens `over`."""
    if pivot < 0:
        return np.ones(len(turns))
    if not over.any():
        return np.zeros(len(turns))
    pivot = min(pivot, turns[over].max())
    logits = -((turns - pivot) ** 2) / (2 * sigma**2)
    w = np.exp(logits - logits[over].max()) * over
    return over.sum() * w / w.sum()


def grpo(rewards):
    if len(rewards) < 2 or np.std(rewards, ddof=1) < EPS:
        return np.zeros(len(rewards))
    return (rewards - np.mean(rewards)) / (np.std(rewards, ddof=1) + EPS)


def advantages(
    rewards,
    grades,
    pivots,
    weights,
    group_ids,
    turn_ids,
    mask_before_turn,
    *,
    kernel_sigma=1.0,
    min_graded_fraction=0.5,
    negative_rewards="literal",
    kernel_norm="response",
):
    """token, token_unmasked, row, subtask, share, decomposed, sigma_batch, denominator."""
    rewards, weights = np.asarray(rewards, np.float64), np.asarray(weights, np.float64)
    n, k = weights.shape
    share, graded = np.zeros((n, k)), np.zeros(n, bool)
    valid = (group_ids >= 0) & (weights > 0).any(axis=1)
    for i in np.flatnonzero(valid):
        share[i], graded[i] = shares(grades[i], weights[i] > 0)
        if negative_rewards == "uniform" and rewards[i] < 0:
            share[i] = (weights[i] > 0) / (weights[i] > 0).sum()
    r = rewards[:, None] * share
    subtask, raw, row = np.zeros((n, k)), np.zeros(n), np.zeros(n)
    decomposed = np.zeros(n, bool)
    for group in set(group_ids[valid].tolist()):
        rows = np.flatnonzero(valid & (group_ids == group))
        if not graded[rows].any() or graded[rows].mean() < min_graded_fraction:
            row[rows] = grpo(rewards[rows])
            continue
        decomposed[rows] = True
        subtask[rows] = r[rows] - r[rows].mean(axis=0)
        raw[rows] = (weights[rows] * subtask[rows]).sum(axis=1)
    sigma = np.std(raw[decomposed], ddof=1) if decomposed.sum() > 1 else 0.0
    denominator = 1.0 if sigma < EPS else sigma + EPS
    row[decomposed] = raw[decomposed] / denominator
    token = np.zeros(turn_ids.shape)
    for i in np.flatnonzero(valid):
        sampled = np.flatnonzero(turn_ids[i] >= 0)
        if not decomposed[i]:
            token[i, sampled] = row[i]
            continue
        turns = turn_ids[i, sampled]
        over = turns >= mask_before_turn[i] if kernel_norm == "active" else turns >= 0
        for j in range(k):
            pivot = pivots[i, j] if graded[i] else -1
            m = kernel(turns, pivot, kernel_sigma, over)
            token[i, sampled] += weights[i, j] * subtask[i, j] * m / denominator
    kept = (turn_ids >= 0) & (turn_ids >= mask_before_turn[:, None])
    assert math.isfinite(sigma)
    return {
        "token": np.where(kept, token, 0),
        "token_unmasked": token,
        "row": row,
        "subtask": subtask,
        "share": share,
        "decomposed": decomposed,
        "sigma_batch": sigma,
        "denominator": denominator,
    }
