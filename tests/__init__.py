"""Tests of pytorchrl.

This file makes the folder a regular package: workers import the tests' classes from it, although an installed package
has a folder `tests` of its own.
"""
