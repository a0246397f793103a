"""Why a run failed: the kind of an exception, memory that was missing, kills by the kernel."""
