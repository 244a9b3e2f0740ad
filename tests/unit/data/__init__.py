"""Tests of the data layer; a package so that they can share `makers`."""
