class FlightRecorderHook:
    def __init__(self, max_entries):
        self.max_entries = max_entries

    def register_with_comm(self, comm):
        comm.recorder = self
