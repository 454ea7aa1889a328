/** The files that the ranks of a job wrote into EVERSTEP_OUTPUT_DIR, with a download of each. */
import { useQuery } from '@tanstack/react-query'

import { useJobAddress } from '../api/addresses'
import { address } from '../api/client'
import { MOST_OUTPUTS, outputsQuery } from '../api/queries'
import type { OutputEntry, TrainingJob } from '../contract'
import { bytes } from '../model/format'
import { byGeneration, shellWord, type GenerationOutputs } from '../model/outputs'
import { Command, Empty, Filter, Shown, Status } from '../parts/Basics'
import { Card } from '../parts/Card'
import { Table } from '../parts/Table'
import { useAddress } from '../parts/address'
import { OUTPUTS } from '../words/outputs'

/** Limit of rows per generation. The filter finds the other files. */
const MOST_ROWS = 500

export default function JobOutputsTab({ job }: { job: TrainingJob }) {
  const name = useJobAddress(job)
  const query = useQuery(outputsQuery(name))
  return (
    <div className="stack">
      <Unstored job={job} />
      <Shown query={query} empty={<Empty {...OUTPUTS.empty} />}>
        {(outputs) => <Outputs job={name} outputs={outputs} />}
      </Shown>
    </div>
  )
}

function Unstored({ job }: { job: TrainingJob }) {
  const named = job.UnstoredOutputs ?? []
  if (!named.length) return null
  const left = (job.UnstoredOutputCount ?? 0) - named.length
  return (
    <Card title={OUTPUTS.unstored.title}>
      <ul>
        {named.map((each) => (
          <li key={each.Path}>{OUTPUTS.unstored.line(each.Path, each.Cause)}</li>
        ))}
        {left > 0 && <li>{OUTPUTS.unstored.more(left)}</li>}
      </ul>
    </Card>
  )
}

function Outputs({ job, outputs }: { job: string; outputs: OutputEntry[] }) {
  const [search, set] = useAddress()
  const text = search.get('q') ?? ''
  const newest = Math.max(...outputs.map((each) => each.Generation))
  const found = byGeneration(outputs, text)
  const shown = found.reduce((sum, group) => sum + group.files.length, 0)
  const total = outputs.reduce((sum, each) => sum + each.Bytes, 0)
  return (
    <div className="stack">
      <div className="row">
        <Filter {...OUTPUTS.filter} value={text} onChange={(value) => set({ q: value })} />
        <span className="dim" role="status">
          {text ? OUTPUTS.found(shown, outputs.length) : OUTPUTS.summary(outputs.length, bytes(total))}
        </span>
      </div>
      {found.length ? (
        found.map((group) => (
          <Generation key={group.generation} job={job} group={group} isNewest={group.generation === newest} />
        ))
      ) : (
        <p className="dim">{OUTPUTS.none}</p>
      )}
      <section className="card">
        <p>{OUTPUTS.all}</p>
        <Command text={`everstep jobs output ${shellWord(job)} --to outputs`} />
        {outputs.length >= MOST_OUTPUTS && <p className="dim">{OUTPUTS.limited(MOST_OUTPUTS)}</p>}
      </section>
    </div>
  )
}

function Generation({ job, group, isNewest }: { job: string; group: GenerationOutputs; isNewest: boolean }) {
  const { columns } = OUTPUTS
  const title = OUTPUTS.generation(group.generation)
  const hidden = group.files.length - MOST_ROWS
  const link = ({ Key, Path }: OutputEntry) => (
    <a
      href={address('GetOutput', { TrainingJobName: job, Key }).url}
      download={Path.split('/').at(-1)}
      aria-label={OUTPUTS.downloadOf(Path)}
    >
      {OUTPUTS.download}
    </a>
  )
  return (
    <Card
      isFlush
      title={
        <>
          {title} {isNewest && <Status tone="idle" word={OUTPUTS.newest} />}
        </>
      }
      actions={<span className="dim">{OUTPUTS.summary(group.files.length, bytes(group.bytes))}</span>}
    >
      <Table
        label={title}
        isStacked={false}
        rows={group.files.slice(0, MOST_ROWS)}
        keyOf={(file) => file.Key}
        columns={[
          [columns.path, (file) => file.Path, 'mono path'],
          [columns.size, (file) => bytes(file.Bytes), 'n'],
          [columns.download, link, 'n unnamed'],
        ]}
      />
      {hidden > 0 && <p className="dim empty">{OUTPUTS.more(hidden)}</p>}
    </Card>
  )
}
