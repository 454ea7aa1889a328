/** Merges the log lines of several ranks. Pure. */
import type { LogEvent } from '../contract'

type Placed = Pick<LogEvent, 'Timestamp' | 'NodeId' | 'Rank' | 'Stream'>

/**
 * Merge lines by time without changing the order of any rank's own lines.
 *
 * The time of a line is the time at which its agent read the line. The agent's clock may be set back. A line therefore
 * counts as no older than the previous line of the same rank and stream.
 */
export function inLineOrder<T extends Placed>(lines: readonly T[]): T[] {
  const newest = new Map<string, number>()
  const dated = lines.map((line) => {
    const writer = `${line.NodeId} ${line.Rank ?? ''} ${line.Stream}`
    const at = Math.max(newest.get(writer) ?? -Infinity, line.Timestamp)
    newest.set(writer, at)
    return { line, at }
  })
  return dated.sort((a, b) => a.at - b.at).map(({ line }) => line)
}
