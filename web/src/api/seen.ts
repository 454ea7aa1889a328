/**
 * Keeps connections open only while the tab is visible.
 *
 * A browser allows six connections to a server over all its tabs, and an open stream occupies one of them all the time.
 */

/**
 * Call `begin` whenever the tab is or becomes visible, and `end` whenever it becomes hidden.
 *
 * Returns a function that calls `end` and stops the observation.
 */
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
