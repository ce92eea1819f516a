"""Replicas of one training that exchange weights now and then: local SGD, DiLoCo, streaming DiLoCo.

A replica is all ranks of one coordinate on the axis ``data_parallel_replicate``: tensor, pipeline and sharding work
within it as ever, and nothing else crosses that axis but what :mod:`.window` exchanges.
"""
