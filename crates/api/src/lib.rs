//! REST: routes, wire types, error forms, OpenAPI.
