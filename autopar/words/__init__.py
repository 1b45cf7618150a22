"""Numbers and tables in words, as every command, message, plan and page shows them. It imports nothing of ours."""
