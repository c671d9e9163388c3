"""gdn_ref inside other libraries. Nothing here is imported by the package itself."""
