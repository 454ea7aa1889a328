/** Every text of a job's Outputs tab. */
import { count, plural } from '../model/format'

export const OUTPUTS = {
  summary: (files: number, size: string) => `${plural(files, 'file')}, ${size}`,
  found: (shown: number, all: number) => `${count(shown)} of ${plural(all, 'file')}`,
  filter: { label: 'Filter by path', placeholder: 'Path  ( / )' },
  generation: (number: number) => `Generation ${number}`,
  newest: 'newest',
  columns: { path: 'Path', size: 'Size', download: 'Download' },
  download: 'Download',
  downloadOf: (path: string) => `Download ${path}`,
  all: 'Download the newest file of each path with this command:',
  limited: (limit: number) => `The page lists the first ${count(limit)} files. The command downloads all of them.`,
  unstored: {
    title: 'Not in S3',
    line: (path: string, cause: string) => `${path} (${cause})`,
    more: (left: number) => `${count(left)} more`,
  },
  none: 'No path matches the filter.',
  more: (hidden: number) => `${plural(hidden, 'more file')}. Filter by path to see them.`,
  empty: {
    title: 'This job has no outputs',
    text: 'A rank writes output files into the directory EVERSTEP_OUTPUT_DIR. Everstep uploads them to S3.',
  },
} as const
