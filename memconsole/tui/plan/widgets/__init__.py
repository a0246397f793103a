"""The widgets of the plan screen."""
