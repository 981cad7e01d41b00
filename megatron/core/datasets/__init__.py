"""Token files, sample order, blends and samplers; see README.md."""
