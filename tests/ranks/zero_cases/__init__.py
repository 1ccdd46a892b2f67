"""What one rank does in the tests of ZeroRedundancyOptimizer; the same on gloo, on NCCL, and on threads.

Every function here runs on each rank of a fresh default group and raises if something is wrong.
"""
