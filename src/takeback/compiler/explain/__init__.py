"""Accounts for every byte of a plan: the ledger, eager's peak for comparison, and the report as text, JSON or HTML."""
