"""takeback inside of other people's training loops. Each module needs its framework, and is imported by its own name:
`import takeback` imports none of them."""
