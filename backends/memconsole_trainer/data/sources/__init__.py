"""Where text, records and token rows come from: files, tables, HDF5 and streams, in a fixed order, with hashes."""
