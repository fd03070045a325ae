"""The package is described in pyproject.toml; this file is for tools that still call setup.py."""

from setuptools import setup

setup()
