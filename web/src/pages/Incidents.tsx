/** Incidents of all jobs: open ones first, with filters in the URL. */
import { NativeSelect, SegmentedControl } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'

import { incidentsQuery } from '../api/queries'
import type { Incident } from '../contract'
import { filtered, NO_OWNER, troubleFirst, valuesOf, type IncidentFilter } from '../model/incidentList'
import type { VerdictLine } from '../model/standing'
import { causeTitle } from '../model/causes'
import { Empty, Filter, Shown } from '../parts/Basics'
import { Card } from '../parts/Card'
import { IncidentTable } from '../parts/IncidentTable'
import { Page } from '../parts/PageHead'
import { useAddress } from '../parts/address'
import { INCIDENTS } from '../words/incident'

const SHOWN = 500
/** Maximum number of incidents that the page requests, beginning with the newest. */
const ASKED = 1_000
const WORDS = INCIDENTS.filters

export default function IncidentsPage() {
  const query = useQuery(incidentsQuery())
  return (
    <Page title={INCIDENTS.title} verdict={query.data?.length ? verdictOf(query.data) : undefined}>
      <Shown query={query} empty={<Empty {...INCIDENTS.empty} command="everstep incidents list" />}>
        {(incidents) => <List incidents={incidents} />}
      </Shown>
    </Page>
  )
}

function verdictOf(incidents: readonly Incident[]): VerdictLine {
  const open = incidents.filter((each) => each.ClosedAt === undefined)
  const unseen = open.filter((each) => each.AcknowledgementTime === undefined).length
  if (open.length === 0) return { tone: 'good', lead: INCIDENTS.verdict.calm }
  const text = unseen ? INCIDENTS.verdict.unseen(unseen, open.length) : undefined
  return { tone: unseen ? 'warn' : 'busy', lead: INCIDENTS.verdict.open(open.length), text }
}

function List({ incidents }: { incidents: Incident[] }) {
  const [search, set, field] = useAddress()
  const filter: IncidentFilter = {
    text: search.get('q') ?? '',
    state: (search.get('state') ?? '') as IncidentFilter['state'],
    cause: search.get('cause') ?? '',
    owner: search.get('owner') ?? '',
    project: search.get('project') ?? '',
  }
  const found = troubleFirst(filtered(incidents, filter))
  const projects = valuesOf(incidents, 'Project')
  const owners = valuesOf(incidents, 'Owner').map((owner) => ({ value: owner, label: owner }))
  const counted = INCIDENTS.counted(found.length, incidents.length)
  return (
    <>
      <div className="row">
        <Filter label={WORDS.text} placeholder={WORDS.placeholder} value={filter.text} onChange={(q) => set({ q })} />
        <SegmentedControl
          size="xs"
          aria-label={WORDS.state}
          value={filter.state || 'all'}
          onChange={(state) => set({ state: state === 'all' ? '' : state })}
          data={Object.entries(WORDS.states).map(([value, label]) => ({ value, label }))}
        />
        <NativeSelect
          size="xs"
          aria-label={WORDS.cause}
          {...field('cause')}
          data={[
            { value: '', label: WORDS.everyCause },
            ...valuesOf(incidents, 'Cause').map((cause) => ({ value: cause, label: causeTitle(cause) })),
          ]}
        />
        <NativeSelect
          size="xs"
          aria-label={WORDS.owner}
          {...field('owner')}
          data={[{ value: '', label: WORDS.everyOwner }, { value: NO_OWNER, label: WORDS.noOwner }, ...owners]}
        />
        {projects.length > 1 && (
          <NativeSelect
            size="xs"
            aria-label={WORDS.project}
            {...field('project')}
            data={[{ value: '', label: WORDS.everyProject }, ...projects]}
          />
        )}
        <span className="dim">
          {incidents.length >= ASKED && `${INCIDENTS.newest} `}
          {counted}
        </span>
      </div>
      <Card isFlush>
        {found.length ? (
          <IncidentTable incidents={found.slice(0, SHOWN)} withOwner />
        ) : (
          <p className="dim empty">{INCIDENTS.none}</p>
        )}
      </Card>
    </>
  )
}
