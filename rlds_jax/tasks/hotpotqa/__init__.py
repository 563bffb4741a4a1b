"""HotpotQA: multi-hop questions answered by searching an encyclopedia (METHOD section 6)."""
