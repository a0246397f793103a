"""Programs that `memconsole export` copies beside a model's weights, as model.py. They import nothing of
memconsole."""
