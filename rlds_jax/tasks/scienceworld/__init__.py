"""ScienceWorld: thirty kinds of science experiment in a simulated house (METHOD section 6)."""
