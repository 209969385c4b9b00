// The page asks no other host: without a validator, and with the document of this daemon.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#document",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  filter: true,
  tryItOutEnabled: true,
  validatorUrl: null,
});
