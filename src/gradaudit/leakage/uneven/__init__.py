"""Gradients whose entries are known unevenly: seen through rounding, through an optimizer's step, through noise."""
