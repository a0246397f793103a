"""Linear systems: families of real plants, their optimal controllers, and simulation."""
