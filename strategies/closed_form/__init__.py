"""Heads in closed form: statistics that add up over sites, and the solvers that make a head of
their sum.
"""
