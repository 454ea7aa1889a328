/** Give a file to whoever looks at the page. */
export function download(name: string, parts: string[], type = 'text/plain'): void {
  const url = URL.createObjectURL(new Blob(parts, { type }))
  Object.assign(document.createElement('a'), { href: url, download: name }).click()
  URL.revokeObjectURL(url)
}
