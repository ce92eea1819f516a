"""The subcommands of ``lightning-hybrid``, one module each."""
