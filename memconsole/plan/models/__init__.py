"""Models: their shapes and weights, sizes chosen for them, and what a Hugging Face directory says of one."""
