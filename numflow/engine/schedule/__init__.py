"""Who runs next and who holds which block, as integers: no model, no arrays, no clock."""
