"""Plans as job files of other engines: SkyPilot and Kubernetes' JobSet."""
