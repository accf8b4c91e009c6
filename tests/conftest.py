"""What holds for the whole run of the tests."""

import signal

# A shell that starts the run in the background has it ignore Ctrl-C, and so all its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
