"""Numbers in words, as every command, plan and page shows them. It imports nothing of ours."""
