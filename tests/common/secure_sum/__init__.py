"""Tests of secure sums."""
