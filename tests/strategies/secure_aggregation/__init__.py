"""Tests of secure aggregation over the grid."""
