"""Streams under a seeded schedule of faults, and the laws that hold nevertheless.

``python -m tests.chaos --seed N --streams N --seconds N`` runs it; ``make chaos`` runs a minute.
"""
