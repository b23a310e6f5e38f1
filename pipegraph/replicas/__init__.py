"""Replicas of a model on several device slots."""
