"""The page at /docs: it shows the OpenAPI document without any other host."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>API</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;width:3.5rem}
code,pre{font-family:ui-monospace,monospace;background:#8881}pre{overflow:auto;padding:.6rem}
</style></head><body><h1 id="title"></h1><div id="paths"></div><h2>Schemas</h2><div id="schemas"></div>
<script>
const add=(parent,tag,text)=>{const e=document.createElement(tag);if(text)e.textContent=text;
  return parent.appendChild(e)};
const fold=(parent,title,method)=>{const d=add(parent,"details"),s=add(d,"summary");
  if(method)add(s,"b",method.toUpperCase());add(s,"code",title);return [d,s]};
fetch("api-doc/openapi.json").then(r=>r.json()).then(doc=>{
  document.getElementById("title").textContent=doc.info.title+" "+doc.info.version;
  for(const [path,methods] of Object.entries(doc.paths))for(const [method,op] of Object.entries(methods)){
    const [d,s]=fold(document.getElementById("paths"),path,method);add(s,"span"," "+op.summary);
    add(d,"pre",JSON.stringify({requestBody:op.requestBody,responses:op.responses},null,2))}
  for(const [name,schema] of Object.entries(doc.components.schemas)){
    const [d]=fold(document.getElementById("schemas"),name);add(d,"pre",JSON.stringify(schema,null,2))}
});
</script></body></html>
"""
"""Shows the document with a few lines of script and nothing from elsewhere."""
