"""Health, readiness and server information."""
