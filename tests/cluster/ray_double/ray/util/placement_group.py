class placement_group:
    """Granted at once: nobody else is here."""

    def __init__(self, bundles, bundle_label_selector):
        pass

    def wait(self, seconds):
        return True


def remove_placement_group(group):
    pass
