"""The roles of an asynchronous run: who writes, who scores, who conducts, and who starts them."""
