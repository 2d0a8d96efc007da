"""What methods of one family have in common: which settings fit, what a site sends, and how much work it is."""
