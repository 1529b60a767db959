"""Wrappers under the names that kt-kernel has for them."""
