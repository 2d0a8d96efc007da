"""Tests of secure sums over the grid."""
