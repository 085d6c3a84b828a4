"""Measurements that print the peer or the floor beside themselves; never part of the tests."""
