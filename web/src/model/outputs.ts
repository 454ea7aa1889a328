/** The output files of a job, by generation. Pure. */
import type { OutputEntry } from '../contract'

export interface GenerationOutputs {
  generation: number
  files: OutputEntry[]
  bytes: number
}

/** Group the files whose path contains the text, ignoring case: the newest generation first, files by path. */
export function byGeneration(outputs: readonly OutputEntry[], text = ''): GenerationOutputs[] {
  const groups = new Map<number, OutputEntry[]>()
  for (const each of outputs) {
    if (!each.Path.toLowerCase().includes(text.toLowerCase())) continue
    const group = groups.get(each.Generation)
    if (group) group.push(each)
    else groups.set(each.Generation, [each])
  }
  return [...groups]
    .sort(([a], [b]) => b - a)
    .map(([generation, files]) => ({
      generation,
      files: files.toSorted((a, b) => a.Path.localeCompare(b.Path, 'en', { numeric: true })),
      bytes: files.reduce((sum, file) => sum + file.Bytes, 0),
    }))
}

/** Return a text as one word of a POSIX shell, in quotes if it contains special characters. */
export const shellWord = (text: string): string =>
  /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`
