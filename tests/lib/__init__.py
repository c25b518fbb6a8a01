"""Helpers of several tests: graphs and models, pools of ranks, faked devices, planted errors."""
