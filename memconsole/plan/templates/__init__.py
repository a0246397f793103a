"""Templates: how records and chats are written as text, and which template a plan uses."""
