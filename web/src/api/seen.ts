/** What is held open only while this tab is seen: a browser allows all tabs together six connections to a server, and a stream never gives its own back. */

/** Begin now, or as soon as this tab is seen; end whenever it is hidden, and begin again when it is seen again. Returns what ends it for good. */
export function whileVisible(begin: () => void, end: () => void): () => void {
  let isBegun = false
  const look = (isWanted: boolean) => {
    if (isWanted === isBegun) return
    isBegun = isWanted
    if (isWanted) begin()
    else end()
  }
  const listen = () => look(document.visibilityState === 'visible')
  document.addEventListener('visibilitychange', listen)
  listen()
  return () => {
    document.removeEventListener('visibilitychange', listen)
    look(false)
  }
}
