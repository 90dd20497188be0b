"""How a merge is computed: read in pieces, scheduled on threads, on a processor or a device."""
