"""The dashboard: reads run directories, starts and stops runs as processes of their own."""
