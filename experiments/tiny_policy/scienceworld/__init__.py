"""The tiny policy of configs/scienceworld.py:tiny: scripted play, its grades, its build."""
