import { Link } from 'react-router'

import { useJobAddress } from '../api/addresses'
import type { Incident, TrainingJob } from '../contract'
import type { IncidentFigures } from '../model/figures'
import { standingOf } from '../model/incident'
import { INCIDENT } from '../words/incident'
import { JOB } from '../words/job'
import { Acknowledge } from './Acknowledge'
import { Ago, Status } from './Basics'
import { Card } from './Card'
import { Happened } from './Happened'
import { PhaseBar, PhaseLengths } from './IncidentTable'

interface Props {
  incident: Incident
  figures: IncidentFigures
  job: Pick<TrainingJob, 'FleetName'>
}

/** The open incident of a job, or its latest one, in the layout of the incident's page. */
export function LatestIncident({ incident, figures, job }: Props) {
  const address = useJobAddress(incident)
  const words = JOB.incident
  const title = incident.ClosedAt === undefined ? words.open : words.last
  const id = encodeURIComponent(incident.IncidentId)
  const actions = (
    <>
      <Acknowledge incident={incident} />
      {incident.AcknowledgementTime !== undefined && (
        <span className="dim">
          {INCIDENT.acknowledged} {incident.AcknowledgedBy} <Ago at={incident.AcknowledgementTime} />
        </span>
      )}
      <Link className="link" to={`/jobs/${encodeURIComponent(address)}/logs?failure=${id}`}>
        {words.log}
      </Link>
      <Link className="link" to={`/incidents/${id}`}>
        {words.all}
      </Link>
    </>
  )
  const heading = (
    <span className="row">
      {title} <Status {...standingOf(incident)} />
    </span>
  )
  return (
    <Card title={heading} label={title} actions={actions}>
      <Happened incident={incident} figures={figures} fleet={job.FleetName} />
      <div className="below">
        <PhaseBar incident={incident} width="100%" height={6} />
        <PhaseLengths incident={incident} />
      </div>
    </Card>
  )
}
