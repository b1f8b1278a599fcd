"""Measuring a pack against its source model: accuracy, single products, speed."""
