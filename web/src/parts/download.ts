/** Let the browser save a file with this name and content. */
export function download(name: string, parts: string[], type = 'text/plain'): void {
  const url = URL.createObjectURL(new Blob(parts, { type }))
  Object.assign(document.createElement('a'), { href: url, download: name }).click()
  URL.revokeObjectURL(url)
}
